"""Evaluation of a policy on environments: `eval` by itself, and the online evaluations of a training.

    runner   one environment's tasks × samples against an engine → EnvResult
    summary  EnvResult → numbers (means, intervals, pass@k), metric rows, the console line
    report   report.json, episodes.jsonl and report.html of several environments
    paired   two reports on the same tasks compared
    main     the process of `eval`

What counts, everywhere: an episode that failed or ran into a deadline is scored with the reward it has (0 where none
was given) and flagged; an episode that was never finished because the evaluation was stopped is not scored, and the
result is marked partial. An episode is a success when its reward is at least 1: with a partial reward, full marks.
"""
