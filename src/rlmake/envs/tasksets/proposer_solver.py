"""Proposer–solver: the policy proposes a word, then tries several times to write it backwards. For hierarchical_grpo.

A task is the letter that the word begins with. The solver scores by similarity, the proposer by how near to half of the
attempts succeed (a word that is not as asked: 0, and nobody solves it).
"""

import verifiers.v1 as vf
from pydantic import Field

from rlmake.envs.made import proposer_solver as rules


class LetterData(vf.TaskData):
    """The letter that the proposal begins with."""

    letter: str


class LetterTask(vf.Task[LetterData]):
    """One proposal and the attempts at it."""

    @property
    def key(self) -> str:
        return self.data.letter


class ProposerSolverTaskset(vf.Taskset[LetterTask, vf.TasksetConfig]):
    """The alphabet."""

    def load(self):
        for letter in rules.LETTERS:
            data = LetterData(id=letter, letter=letter, prompt=rules.proposal_prompt(letter))
            yield LetterTask(data, self.config.task)


class ProposerSolverEnvConfig(vf.EnvConfig):
    """The two roles, and how often the solver tries."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    attempts: int = Field(4, ge=1)


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    """One proposal, then `attempts` solutions."""

    async def run(self, task, agents):
        proposal = await agents.proposer.run(task)
        word = proposal.last_reply
        valid = rules.is_valid(word, task.data.letter)
        proposal.record_metric("valid", float(valid))
        if not proposal.ok or not valid:
            proposal.record_reward("learnability", 0.0)
            return
        solved = []
        for _ in range(self.config.attempts):
            data = vf.TaskData(idx=task.data.idx, id=word, prompt=rules.solver_prompt(word))
            trace = await agents.solver.run(vf.Task(data))
            trace.record_reward("similarity", rules.similarity(trace.last_reply, word))
            solved.append(trace.last_reply == word[::-1])
        proposal.record_reward("learnability", rules.learnability(solved))


__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]
