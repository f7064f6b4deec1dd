"""Inference: one HTTP contract over an engine. `server` is the process, `app` the routes, `engines` what generates.

Clients reach it over HTTP only; the launcher starts it as `python -m rlmake.inference.server @ inference.json`. It may
live in an environment of its own, so it imports neither verifiers, Snakemake nor datasets.
"""
