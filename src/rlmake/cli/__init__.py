"""Command lines: the console scripts and `rlmake <verb>`. Thin: parse, then hand over to `launch` or the build."""
