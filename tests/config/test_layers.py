"""Composition of files and command lines: precedence, `extends`, null, and nothing dropped unseen (fault case O08)."""

import pytest
from config_samples import SOURCE

from rlmake.config import EvalConfig, ExperimentTable, RLConfig, SFTConfig, compose, parse_argv
from rlmake.config.faults import EXPERIMENT
from rlmake.config.layers import Composed, line_of, load_layer, overlay
from rlmake.core.errors import ConfigError, UserError

BASE = """
max_steps = 3
output_dir = "from-base"
inference = {}
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
[monitors.file]
path = "from-base"
[ckpt]
keep_last = 2
[orchestrator]
renderer.name = "qwen3"
batch_size = 64
[[orchestrator.train.source]]
name = "one"
env.taskset.id = "reverse-text"
[[orchestrator.train.source]]
name = "two"
env.taskset.id = "reverse-text"
[model]
name = "outputs/a/sft/weights"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    write("base.toml", BASE)
    return write


def rl(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, list(argv))[0]


def faults(*argv: str, cls=RLConfig) -> str:
    with pytest.raises(ConfigError) as error:
        parse_argv(cls, list(argv))
    return str(error.value)


def test_lists_replace_and_tables_merge(write):
    write("over.toml", '[ckpt]\ninterval = 4\n[[orchestrator.train.source]]\nenv.taskset.id = "rt"\n')
    config = rl("@", "base.toml", "@", "over.toml", "--max-steps", "5")
    assert [source.name for source in config.orchestrator.train.source] == ["rt"]
    assert (config.trainer.ckpt.interval, config.trainer.ckpt.keep_last) == (4, 2)
    assert config.trainer.max_steps == config.orchestrator.max_steps == 5


LINEAR = '[trainer.scheduler]\ntype = "linear"\nwarmup_steps = 2\ndecay_steps = 1\n[trainer.optim]\nbetas2 = 0.9\n'


def test_another_type_leaves_behind_what_only_the_earlier_one_has(write):
    write("linear.toml", LINEAR)
    write(
        "over.toml",
        '[experiment]\nkind = "rl"\nextends = ["base.toml", "linear.toml"]\n'
        + '[trainer.scheduler]\ntype = "constant"',
    )
    assert rl("@", "over.toml").trainer.scheduler.type == "constant"
    assert rl("@", "base.toml", "@", "linear.toml", "--trainer.scheduler.type", "constant").trainer.optim.betas2 == 0.9
    write(
        "on.toml", '[experiment]\nextends = ["over.toml"]\n[trainer]\nscheduler.type = "cosine"\noptim.type = "sgd"\n'
    )
    config = rl("@", "on.toml")
    assert config.trainer.scheduler.warmup_steps == 2, "both have it"
    assert config.trainer.optim.type == "sgd"


def test_a_key_that_the_chosen_type_lacks_is_refused(write):
    """Set beside the type or after it, not before it."""
    write("linear.toml", LINEAR)
    write("one.toml", '[trainer.scheduler]\ntype = "constant"\ndecay_steps = 4\n')
    write("late.toml", "trainer.scheduler.warmup_steps = 3")
    said = "trainer.scheduler.decay_steps: unknown key for this type; 'linear' has it"
    assert faults("@", "base.toml", "@", "linear.toml", "@", "one.toml") == f"one.toml:3: {said}"
    write("two.toml", '[trainer.scheduler]\ntype = "constant"\n')
    assert faults("@", "base.toml", "@", "linear.toml", "@", "two.toml", "@", "late.toml") == (
        "late.toml:1: trainer.scheduler.warmup_steps: unknown key for this type; 'linear' and 'cosine' have it"
    )


def test_precedence_command_line_later_earlier_env_default(write, monkeypatch):
    monkeypatch.setenv("PRL_OUTPUT_DIR", "from-env")
    write("late.toml", 'output_dir = "from-late"')
    write("none.toml", BASE.replace('output_dir = "from-base"', ""))
    assert rl("@", "base.toml", "@", "late.toml", "--output-dir", "from-cli").output_dir == "from-cli"
    assert rl("@", "base.toml", "@", "late.toml").output_dir == "from-late"
    assert rl("@", "late.toml", "@", "base.toml").output_dir == "from-base"
    assert rl("@", "none.toml").output_dir == "from-env"
    monkeypatch.delenv("PRL_OUTPUT_DIR")
    assert rl("@", "none.toml").output_dir == "outputs"


def test_options_win_wherever_they_stand(write):
    assert rl("--max-steps", "9", "@", "base.toml").max_steps == 9


def test_dashes_and_underscores_on_the_command_line_only(write):
    assert rl("@", "base.toml", "--orchestrator.batch_size", "32").orchestrator.batch_size == 32
    assert rl("@", "base.toml", "--orchestrator.batch-size", "32").orchestrator.batch_size == 32
    write("dash.toml", "[orchestrator]\nbatch-size = 32\n")
    text = faults("@", "base.toml", "@", "dash.toml")
    assert text == "dash.toml:2: orchestrator.batch-size: unknown key; did you mean 'batch_size'?"


def test_unknown_options_are_refused_with_a_suggestion(write):
    assert faults("@", "base.toml", "--max-stepz", "5") == (
        "command line: max_stepz: unknown key; did you mean 'max_steps'?"
    )
    text = faults("@", "base.toml", "--trainer.optim.learning-rate", "1")
    assert text.startswith("command line: trainer.optim.learning_rate: unknown key")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optim.lr", "optim: unknown key; there is 'trainer.optim'"),
        ("trainer.lr", "trainer.lr: unknown key; there is 'trainer.optim.lr'"),
        ("warmup_steps", "warmup_steps: unknown key; there is 'trainer.scheduler.warmup_steps'"),
        (
            "orchestrator.group_size",
            "orchestrator.group_size: unknown key; there is 'orchestrator.eval.group_size' and "
            "'orchestrator.train.group_size'",
        ),
        ("manual", "manual: unknown key; 'manual' belongs into the table [experiment]"),
    ],
)
def test_a_key_that_belongs_into_another_table_is_told_where(write, key, hint):
    write("m.toml", f"{key} = 1\n")
    assert f"m.toml:1: {hint}" in faults("@", "base.toml", "@", "m.toml").splitlines()


def test_keys_of_the_build_are_known_by_name():
    assert set(EXPERIMENT) == set(ExperimentTable.model_fields)


def test_true_and_false_are_no_numbers(write):
    """A slip like `--no-trainer.optim.lr`, or a value forgotten, trains with no learning rate of 0 or 1."""
    lr = "command line: trainer.optim.lr: expected a number, not"
    assert faults("@", "base.toml", "--no-trainer.optim.lr") == f"{lr} false"
    assert faults("@", "base.toml", "--trainer.optim.lr") == f"{lr} true"
    text = """max_steps = true
        [trainer.log]
        ranks_filter = [0, true]
        [trainer.optim]
        lr = false
        max_norm = true
        weight_decay = true
    """
    write("slips.toml", text)
    lines = faults("@", "base.toml", "@", "slips.toml").splitlines()
    for line in (
        "slips.toml:1: max_steps: expected an integer, not true",
        "slips.toml:3: trainer.log.ranks_filter.1: expected an integer, not true",
        "slips.toml:5: trainer.optim.lr: expected a number, not false",
        "slips.toml:6: trainer.optim.max_norm: expected a number, not true",
        "slips.toml:7: trainer.optim.weight_decay: expected a number or 'auto', not true",
    ):
        assert line in lines, lines
    config = rl("@", "base.toml", "--trainer.optim.lr", "3e-5", "--max-steps", "9", "--trainer.log.ranks-filter", "0")
    assert (config.trainer.optim.lr, config.max_steps, config.trainer.log.ranks_filter) == (3e-5, 9, [0])
    assert rl("@", "base.toml", "--deterministic", "false").deterministic is False


def test_a_negation_of_what_is_no_switch_says_so(write):
    expected = "unknown key: --no-… is for true-or-false options and optional tables; give the option a value instead"
    assert faults("@", "base.toml", "--no-max-steps") == f"command line: no_max_steps: {expected}"
    text = faults("@", "base.toml", "--trainer.no-max-steps")
    assert text.endswith("'no' belongs to the front of the whole option, --no-….max-steps")


def test_text_where_a_table_stands_is_refused_both_ways(write):
    write("text.toml", '[monitors]\nfile = "x"\n')
    assert faults("@", "base.toml", "@", "text.toml") == "text.toml: monitors.file: expected a table, not 'x'"
    text = faults("@", "text.toml", "--monitors.file.path", "b")
    assert text == "text.toml: monitors.file: expected a table, not 'x': command line sets keys below it"


def test_booleans_and_switched_tables(write):
    write("ckpt.toml", "clean = true\n[ckpt]\ninterval = 5\n")
    config = rl("@", "base.toml", "@", "ckpt.toml", "--no-clean", "--no-ckpt", "--no-monitors.file", "--dry-run")
    assert config.clean is False and config.ckpt is None and config.dry_run is True
    assert config.trainer.ckpt is None and config.trainer.monitors.file is None
    config = rl("@", "base.toml", "--ckpt", "--resume.step", "4")
    assert config.trainer.ckpt.interval is None and config.orchestrator.resume.step == 4
    assert rl("@", "base.toml", "@", "ckpt.toml", "--ckpt", "None").ckpt is None
    text = faults("@", "base.toml", "--monitors.no-file")
    assert "--no-….file" in text and text.startswith("command line: monitors.no_file")


def test_none_in_a_file_is_null_and_a_table_brings_it_back(write):
    write("off.toml", 'ckpt = "None"\ntrainer.gc = "None"\n')
    write("on.toml", "[ckpt]\ninterval = 2\n")
    assert rl("@", "base.toml", "@", "on.toml", "@", "off.toml").ckpt is None
    config = rl("@", "base.toml", "@", "off.toml", "@", "on.toml")
    assert config.trainer.ckpt.interval == 2 and config.trainer.gc is None


def test_lists_unions_and_elements_on_the_command_line(write):
    config = rl(
        "@", "base.toml", "--trainer.optim.type", "muon", "--trainer.optim.lr", "3e-4", "--trainer.log.ranks-filter",
        "0", "1", "--orchestrator.train.source.1.env.taskset.num", "7", "--orchestrator.train.source.0.ratio=2",
        "--trainer.loss.type", "custom", "--trainer.loss.import-path", "a.b", "--trainer.loss.kwargs.k", "5",
    )  # fmt: skip
    assert (config.trainer.optim.type, config.trainer.optim.lr) == ("muon", 3e-4)
    assert config.trainer.log.ranks_filter == [0, 1]
    assert config.orchestrator.train.source[1].env["taskset"] == {"id": "reverse-text", "num": 7}
    assert config.orchestrator.train.source[0].ratio == 2 and config.trainer.loss.kwargs == {"k": 5}
    sources = '[{"env": {"taskset": {"id": "json"}}}]'
    assert rl("@", "base.toml", "--orchestrator.train.source", sources).orchestrator.train.source[0].name == "json"
    text = faults("@", "base.toml", "--orchestrator.train.source.5.ratio", "2")
    assert text == "command line: orchestrator.train.source.5: there is no element 5: the list has 2"
    assert "not readable as JSON" in faults("@", "base.toml", "--env-vars", "{broken")


def test_a_file_below_a_key(write):
    write("t.toml", "[optim]\nlr = 0.5\n")
    write("bad.toml", "[optim]\nlrr = 0.5\n")
    assert rl("@", "base.toml", "--trainer", "@", "t.toml").trainer.optim.lr == 0.5
    text = faults("@", "base.toml", "--trainer", "@", "bad.toml")
    assert text.startswith("bad.toml:2: trainer.optim.lrr: unknown key")


def test_json_and_yaml_files(write):
    write("a.json", '{"max_steps": 7, "ckpt": null}')
    write("a.yaml", "max_steps: 8\n")
    assert rl("@", "base.toml", "@", "a.json").max_steps == 7
    assert rl("@", "base.toml", "@", "a.json", "@", "a.yaml").max_steps == 8


def test_extends_is_relative_ordered_and_not_inherited(write):
    write("deep/one.toml", 'max_steps = 1\noutput_dir = "one"\n[experiment]\nmanual = true\nkind = "sft"\n')
    write("deep/two.toml", "max_steps = 2\n[ckpt]\ninterval = 4\n")
    write(
        "deep/sub/run.toml",
        '[experiment]\nkind = "rl"\nextends = ["../one.toml", "../two.toml"]\n[ckpt]\nkeep_last = 1\n',
    )
    composed = compose(["deep/sub/run.toml"])
    assert composed == {"max_steps": 2, "output_dir": "one", "ckpt": {"interval": 4, "keep_last": 1}}
    assert composed.origin(["max_steps"]) == "deep/two.toml"
    assert rl("@", "base.toml", "@", "deep/sub/run.toml").max_steps == 2


def test_extends_faults(write):
    write("a.toml", '[experiment]\nextends = ["b.toml"]\n')
    write("b.toml", '[experiment]\nextends = "a.toml"\n')
    assert "b.toml: experiment.extends: extends itself: a.toml → b.toml → a.toml" in faults("@", "a.toml")
    assert not faults("@", "a.toml").startswith("/"), "files are named as they were given"
    write("c.toml", '[experiment]\nextends = ["gone.toml"]\n')
    assert faults("@", "c.toml") == "c.toml: experiment.extends: no such file: gone.toml (gone.toml)"
    write("d.toml", "[experiment]\nextends = [3]\n")
    assert "d.toml: experiment.extends: expected a file or a list of files" in faults("@", "d.toml")


def test_words_that_are_no_option(write):
    table = "--trainer.optim is a table: set its keys (--trainer.optim.lr …) or give a file"
    assert table in faults("@", "base.toml", "--trainer.optim", "foo")
    assert "'foo' belongs to no option; files are given as '@ foo'" in faults("@", "base.toml", "foo")


def test_files_that_cannot_be_read(write):
    write("broken.toml", "a = = 1\n")
    write("list.json", "[1]")
    write("x.ini", "")
    assert faults("@", "gone.toml") == "gone.toml: no such file"
    assert faults("@", "broken.toml").startswith("broken.toml: not readable as TOML: ")
    assert faults("@", "list.json") == "list.json: expected a table at the top, not list"
    assert "expected a file ending in" in faults("@", "x.ini")
    assert faults("@") == "command line: '@' needs a file after it"
    assert faults("@base.toml") == "command line: '@base.toml': write '@ base.toml', with a space"
    assert all("\n" not in str(text) for text in (faults("@", "gone.toml"), faults("@", "broken.toml")))


def test_a_key_that_stands_twice_is_refused_in_every_format(write):
    write("a.json", '{"ckpt": {"interval": 1, "keep_last": 1, "interval": 2}}')
    write("a.yaml", "ckpt:\n  interval: 1\n  interval: 2\n")
    write("a.toml", "[ckpt]\ninterval = 1\ninterval = 2\n")
    assert faults("@", "a.json") == "a.json: not readable as JSON: key 'interval' stands twice in one table"
    assert faults("@", "a.yaml") == "a.yaml: not readable as YAML: key 'interval' stands twice in one table (line 3)"
    assert faults("@", "a.toml").startswith("a.toml: not readable as TOML: ")
    write("b.yaml", "a: &a {interval: 1}\nckpt: {<<: *a, interval: 2}\nlist: [{x: 1}, {x: 2}]\nempty: *a\n")
    assert compose(["b.yaml"])["ckpt"] == {"interval": 2}, "what is merged in may be overridden"
    write("c.yaml", "")
    assert compose(["c.yaml"]) == {}


def test_a_mark_of_byte_order_is_no_content(write):
    """Editors of one system put it in front of a file."""
    for name, text in (("a.toml", "max_steps = 7\n"), ("a.json", '{"max_steps": 7}'), ("a.yaml", "max_steps: 7\n")):
        write(name, "\ufeff" + text)
        assert rl("@", "base.toml", "@", name).max_steps == 7
    write("b.toml", "\ufeffmax_step = 7\n")
    assert faults("@", "base.toml", "@", "b.toml").startswith("b.toml:1: max_step: unknown key")


def test_values_that_no_record_holds(write):
    """Free tables take what they are given, but a configuration must be written down and compared."""
    for value, words in (("nan", "must be finite, not nan"), ("[1, -inf]", "must be finite, not -inf"),
                         ("2026-01-01", "not date 2026-01-01: quote it"), ("10:00:00", "not time 10:00:00: quote it"),
                         ("2026-01-01T10:00:00", "not datetime 2026-01-01 10:00:00: quote it")):  # fmt: skip
        write("a.toml", f'[[orchestrator.train.source]]\nenv.taskset.id = "reverse-text"\nenv.taskset.x = {value}\n')
        (line,) = faults("@", "base.toml", "@", "a.toml").splitlines()
        assert line.startswith("a.toml:3: orchestrator.train.source.0.env.taskset.x") and line.endswith(words)


def test_a_file_of_another_kind_or_a_grid_is_not_started(write):
    write("kind.toml", '[experiment]\nkind = "sft"\n')
    assert faults("@", "kind.toml") == "kind.toml:2: experiment.kind: this file is of kind 'sft', not 'rl'"
    write("grid.toml", '[experiment]\nkind = "rl"\n[experiment.grid]\nseed = [0, 1]\n')
    assert "grid.toml:3: experiment.grid" in faults("@", "base.toml", "@", "grid.toml")
    assert "choose a run of it by --cell: seed=0 seed=1" in faults("@", "base.toml", "@", "grid.toml")
    assert "there is no cell 'seed=2'" in faults("@", "grid.toml", "--cell", "seed=2")
    assert "--cell: no file given declares a grid" in faults("@", "base.toml", "--cell", "seed=0")
    write("suite.toml", "[experiment]\nmanual = true\n")
    assert "needs at least one source" in faults("@", "suite.toml", cls=EvalConfig)


def test_every_fault_is_reported_at_once_with_its_file_and_line(write):
    write("bad.toml", 'max_steps = "many"\n\n[trainer.optim]\nlr = -1\ntyp = "sgd"\n[slurm]\nshared_fs = false\n')
    lines = faults("@", "base.toml", "@", "bad.toml", "--seed", "x").splitlines()
    assert any(line.startswith("bad.toml:7: slurm.shared_fs: ") for line in lines)
    assert "bad.toml:1: trainer.max_steps: expected an integer, not 'many'" in lines or (
        "bad.toml:1: max_steps: expected an integer, not 'many'" in lines
    )
    assert "bad.toml:4: trainer.optim.lr: must be ≥ 0, not -1" in lines
    assert "bad.toml:5: trainer.optim.typ: unknown key; did you mean 'type'?" in lines
    assert "command line: seed: expected an integer, not 'x'" in lines


def test_lines_of_keys_in_arrays_and_dotted_keys(write):
    write("l.toml", 'a.b = 1\n[[x.y]]\nk = 1\n[[x.y]]\nk = 2 # c\n[x.y.z]\n"q" = 3\n')
    assert line_of("l.toml", ("a", "b")) == 1
    assert line_of("l.toml", ("x", "y", "0", "k")) == 3
    assert line_of("l.toml", ("x", "y", "1", "k")) == 5
    assert line_of("l.toml", ("x", "y", "1", "z", "q")) == 7
    assert line_of("l.toml", ("nowhere",)) is None and line_of("gone.toml", ("a",)) is None


def test_overlay_remembers_origins():
    base = Composed()
    overlay(base, {"a": {"b": 1, "c": 2}}, "one")
    overlay(base, {"a": {"b": 3}}, "two")
    assert (base.origin(["a", "b"]), base.origin(["a", "c"])) == ("two", "one")
    overlay(base, {"a": None}, "three")
    overlay(base, {"a": {"d": 1}}, "four")
    assert base == {"a": {"d": 1}}


def test_errors_are_user_errors():
    with pytest.raises(UserError):
        parse_argv(SFTConfig, ["--data.batch-size", "0"])
    assert SOURCE["name"] == "reverse-text"


def test_a_fragment_is_composed_once_and_stays_as_it_is(write):
    write("base/f.toml", "max_steps = 3\n[ckpt]\ninterval = 4\n")
    for name, keep in (("a", 1), ("b", 2)):
        write(f"{name}.toml", f'[experiment]\nextends = ["base/f.toml"]\n[ckpt]\nkeep_last = {keep}\n')
    fragments: dict[str, Composed] = {}
    first, _ = load_layer("a.toml", fragments)
    write("base/f.toml", "max_steps = 9\n")
    second, _ = load_layer("b.toml", fragments)
    first["ckpt"]["interval"] = 5
    assert first == {"max_steps": 3, "ckpt": {"interval": 5, "keep_last": 1}}
    assert second == {"max_steps": 3, "ckpt": {"interval": 4, "keep_last": 2}}, "what was composed for the first file"
    assert fragments == {"base/f.toml": {"max_steps": 3, "ckpt": {"interval": 4}}}
    assert second.origin(["ckpt", "interval"]) == "base/f.toml" and second.origin(["ckpt", "keep_last"]) == "b.toml"
