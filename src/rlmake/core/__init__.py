"""Ground floor: errors, canonical JSON and hashing, typed records, seeds, run-directory paths, statistics, logging.

Anything may import it; it imports nothing of rlmake and neither torch, transformers, datasets nor Snakemake.
"""
