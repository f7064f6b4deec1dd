"""Models: the forward shared by trainer and embedded engine, loading and saving, `init`, and renderers.

`exact` is the batch-invariant fp32 forward, `attention` the document-causal attention of every other case, `logprobs`
what both sides score tokens with. Trainer, inference, export and envs may call it; it knows none of them.
"""
