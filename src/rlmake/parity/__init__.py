"""The agreement of trainer and engine, target `parity`: the same sequences through both, logprobs compared.

    order    what is compared, as the launcher leaves it for the processes
    prompts  the beginnings of sequences, from a run's own data
    ask      process: completions from the engine, with the whole distribution of every token, for one type
    score    process: the same tokens through the trainer's forward, for every type and attention path; report.json
    report   what is reported, from the numbers of both sides

The engine samples as in a rollout (prompt in one pass, then token by token with its cache, in a batch); the trainer
scores whole packed rows under FSDP2, as in a step. So the difference is the one that importance ratios meet.
"""
