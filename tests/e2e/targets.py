"""Every kind of target of a training, once for real: two small SFTs, one of all weights and one of adapters."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import SFT
from safetensors import safe_open

SHORT = SFT.format(steps=4).replace("interval = 4", "interval = 2\nkeep_last = 1")
RUNS = {
    "full": SHORT.replace('evals = ["toy"]', 'best = {suite = "toy"}'),
    "lora": SHORT.replace('evals = ["toy"]\n', "") + "[model.lora]\nrank = 4\n",
}
FULL = (
    "weights", "weights-FP8", "exports/step_2/weights", "exports/step_2/weights-FP8", "exports/best/weights",
    "checkpoints/step_4", "evals/toy@step_2",
)  # fmt: skip
LORA = ("adapter", "weights", "weights-FP8", "exports/step_2/adapter")


def tensors(folder: Path) -> dict[str, str]:
    """Name → data type of all that a directory of weights holds."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.timeout(1200)
def test_all_kinds_of_targets(toy):
    for name, text in RUNS.items():
        toy.write(f"experiments/toy/{name}.toml", text)
    out = toy.folder / "outputs/toy"
    targets = [*(f"outputs/toy/full/{leaf}" for leaf in FULL), *(f"outputs/toy/lora/{leaf}" for leaf in LORA)]
    toy.build(*targets, "--quiet", "all")
    for target in targets:
        assert (toy.folder / target).is_symlink() and any((toy.folder / target).iterdir()), target

    plain = tensors(out / "full/weights")
    assert set(plain.values()) == {"BF16"} and tensors(out / "lora/weights") == plain, "adapters are merged"
    for run in ("full", "lora"):
        eight = tensors(out / run / "weights-FP8")
        quantised = {name for name, dtype in eight.items() if dtype == "F8_E4M3"}
        assert quantised and {f"{name}_scale_inv" for name in quantised} <= set(eight)
        assert json.loads((out / run / "weights-FP8/config.json").read_text())["quantization_config"]
    adapter = tensors(out / "lora/adapter")
    assert adapter and all(".lora_" in name for name in adapter)
    assert json.loads((out / "lora/adapter/adapter_config.json").read_text())["r"] == 4

    best = json.loads((out / "full/exports/best/weights/card.json").read_text())["facts"]
    assert set(best["values"]) == {"2", "4"} and best["values"][str(best["step"])] == max(best["values"].values())
    same = out / f"full/exports/step_{best['step']}/weights" if best["step"] == 2 else out / "full/weights"
    chosen = out / "full/exports/best/weights/model.safetensors"
    assert chosen.read_bytes() == (same / "model.safetensors").read_bytes()
    report = json.loads((out / "full/evals/toy@step_2/report.json").read_text())
    assert report["model_step"] == 2 and report["run"] == "toy/full"

    run = toy.training("outputs/toy/full/logs")
    before = (run / "exports/step_2/weights/model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints/step_2")
    toy.build("outputs/toy/full/checkpoints/step_2", "--quiet", "all")
    assert (run / "checkpoints/step_2/COMPLETE").is_file() and (run / "checkpoints/step_4/COMPLETE").is_file()
    assert (run / "exports/step_2/weights/model.safetensors").read_bytes() == before
    assert "Nothing to be done" in toy.plan(*targets)
