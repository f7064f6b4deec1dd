"""A unit of work: its identity, and what its job needs to know."""

import functools
from dataclasses import dataclass, field
from typing import Any

from rlmake.build import store
from rlmake.build.experiments import CLASSES, Run, Suite
from rlmake.build.fingerprint import leaves
from rlmake.build.store import KIND_OF_STAGE, SPEC_SCHEMA, Artefact
from rlmake.config import EvalConfig
from rlmake.config.fields import walk
from rlmake.core.jsonio import canonical


@dataclass
class Work:
    """One unit of identity, and what its job needs to know.

    `parents` are records {role, stage, fingerprint, step, kind, ref}: `ref` is the text in `config` that stands for the
    parent and that the job replaces by the parent's path. `last_step` is a training's `max_steps`; with `fixed_length`
    the schedule depends on it, so no other step may be the end.
    """

    stage: str
    kind: str
    fingerprint: str
    config: dict[str, Any]
    semantic: dict[str, Any]
    parents: list[dict[str, Any]]
    revisions: dict[str, Any]
    declared: Run | Suite | None
    resources: dict[str, Any]
    last_step: int | None = None
    interval: int | None = None
    fixed_length: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def defaults(self) -> dict[str, Any]:
        """Semantic leaves that nobody set and that hold the schema's own default: what a change in code would shift."""
        if self.declared is None:
            return {}
        given = {key for key, _ in leaves(self.declared.raw)}
        own = _schema_defaults(EvalConfig if isinstance(self.declared, Suite) else CLASSES[self.declared.kind])
        return {
            key: value
            for key, value in leaves(self.semantic)
            if key in own and key not in given and canonical(value) in own[key]
        }

    def artefact(self, kind: str | None = None, step: int | None = None) -> Artefact:
        return store.artefact(self.stage, self.fingerprint, kind or KIND_OF_STAGE[self.stage], step)

    def spec(self, steps: list[int], moment: dict[str, Any]) -> dict[str, Any]:
        """The record `spec.json`. `moment`: planned_at and code; `steps`: those of a training that are asked for."""
        return {
            "schema": SPEC_SCHEMA,
            "stage": self.stage,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "config": self.config,
            "semantic": self.semantic,
            "parents": self.parents,
            "revisions": self.revisions,
            "defaults": self.defaults(),
            "resources": self.resources,
            "fixed_length": self.fixed_length,
            "steps": sorted(steps),
            **self.facts,
            **moment,
        }


@functools.cache
def _schema_defaults(cls: type) -> dict[str, set[bytes]]:
    """`{dotted key: its defaults}` in canonical JSON (several where tables of a union share a key)."""
    found: dict[str, set[bytes]] = {}
    for key, info, _ in walk(cls):
        if not info.is_required():
            default = info.get_default(call_default_factory=True)
            for inner, value in leaves(default, key):
                if isinstance(value, str | int | float | bool | None) or value in ({}, []):
                    found.setdefault(inner, set()).add(canonical(value))
    return found
