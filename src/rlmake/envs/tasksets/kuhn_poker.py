"""Kuhn-poker: self-play of the policy against itself, in two seats. Zero-sum; the reward is the chips won.

The tasks are the six deals. Which replies count as what: `rlmake.envs.made.kuhn_poker`.
"""

import verifiers.v1 as vf

from rlmake.envs.made import kuhn_poker as rules


class DealData(vf.TaskData):
    """The cards of first and second player, two letters."""

    deal: str


class DealTask(vf.Task[DealData]):
    """One hand."""

    @property
    def key(self) -> str:
        return self.data.deal


class KuhnPokerTaskset(vf.Taskset[DealTask, vf.TasksetConfig]):
    """All deals."""

    def load(self):
        for deal in rules.DEALS:
            yield DealTask(DealData(id=deal, deal=deal), self.config.task)


class KuhnPokerEnvConfig(vf.EnvConfig):
    """Two seats, both of the policy; roles have baselines of their own with rae."""

    player0: vf.AgentConfig = vf.AgentConfig()
    player1: vf.AgentConfig = vf.AgentConfig()


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    """Deals, asks whoever is to act, and pays out. A reply that is no legal word counts as the passive one."""

    async def run(self, task, agents):
        deal = task.data.deal
        blank = vf.Task(vf.TaskData(idx=task.data.idx, id=deal))
        async with agents.player0.interaction(blank) as first, agents.player1.interaction(blank) as second:
            history, over = "", False
            while not over:
                seat = rules.SEATS[history]
                player = (first, second)[seat]
                reply = await player.turn(rules.prompt(deal[seat], history))
                text = "" if reply.terminated else reply.last_reply
                self._note(player.trace, rules.is_legal(text, history))
                history, over = rules.follow(history, rules.is_active(text, history))
                if reply.terminated:
                    break
            chips = rules.payoff(deal, history) if over else 0.0
            first.trace.record_reward("chips", chips)
            second.trace.record_reward("chips", -chips)

    @staticmethod
    def _note(trace: vf.Trace, legal: bool) -> None:
        """Share of legal replies is 1 until one is not."""
        trace.record_metric("legal", min(trace.metrics.get("legal", 1.0) or 0.0, float(legal)))


__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]
