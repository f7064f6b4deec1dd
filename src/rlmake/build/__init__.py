"""Experiments → fingerprints → store: what is to be built, what is there already, and who may write it. No torch.

The Snakefile calls `workflow`; jobs read `store` specs and nothing else. Anything above (launch, cli) may call in.
"""
