"""Checkpoints as records on disk: halves, the COMPLETE manifest, retention, and what a resume removes. No torch.

    checkpoints/step_<n>/<half>/…      written as `<half>.tmp-<uuid>`, renamed when whole (`halves.writing`)
    checkpoints/step_<n>/<half>.json   its files with sizes and hashes (`halves.seal`)
    checkpoints/step_<n>/COMPLETE      all halves, written last by the trainer's master (`complete.publish`)

Resume, retention, export and evaluation look only at steps whose COMPLETE agrees with the files beside it.
"""

from rlmake.checkpoint.complete import newest, publish, read, resume_point, steps, verify
from rlmake.checkpoint.halves import abort, begin, commit, disk_full, seal, writing
from rlmake.checkpoint.readers import is_mark, is_read, reading
from rlmake.checkpoint.retention import prune_future, retain, sweep

__all__ = [
    "abort", "begin", "commit", "disk_full", "is_mark", "is_read", "newest", "prune_future", "publish", "read",
    "reading", "resume_point", "retain", "seal", "steps", "sweep", "verify", "writing",
]  # fmt: skip
