"""Exports: a checkpoint or a model directory becomes a Hugging Face directory of another format.

    bf16.export          checkpoint → bf16 safetensors          fp8.quantize       bf16 directory → blockwise FP8
    fp8.export           checkpoint → blockwise FP8             dequantize.export  FP8 directory → bf16
    adapter.export       LoRA checkpoint → PEFT adapter         merge.export       LoRA checkpoint → bf16, merged
    bring.make           a model made elsewhere → bf16

All share one path: a source of named tensors (`sources`), a rule per tensor (bf16, fp8, dequantize), one streaming
writer (`writer`) and one way of making a directory appear whole or not at all (`staging`).
"""
