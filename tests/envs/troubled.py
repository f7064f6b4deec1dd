"""A taskset whose scoring does to its process what the task's text says; written into a folder for the env server."""

SOURCE = """
import asyncio, os, signal, sys, time
import verifiers.v1 as vf

KEPT = []


class TroubleData(vf.TaskData):
    what: str


class TroubleTask(vf.Task[TroubleData]):
    @vf.stop
    async def replied(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0

    @vf.reward(weight=1.0)
    async def outcome(self, trace: vf.Trace) -> float:
        what = self.data.what
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "exit":
            os._exit(7)
        if what == "exit2":
            os._exit(2)
        if what == "long":
            await asyncio.sleep(600)
        if what == "hang":
            time.sleep(600)
        if what == "leak":
            KEPT.append(bytearray(os.urandom(1 << 20) * 64))
        if what == "flood":
            KEPT.append(bytearray(b"x") * (3 << 29))
            await asyncio.sleep(600)
        if what == "garbage":
            os.write(1, bytes(range(256)) * 40)
            print("\\x00\\x1b[2J not a log line", file=sys.stderr)
        if what == "slow":
            await asyncio.sleep(1.0)
        return float(os.getpid())


class TroubleConfig(vf.TasksetConfig):
    whats: list[str] = []


class TroubleTaskset(vf.Taskset[TroubleTask, TroubleConfig]):
    def load(self):
        for number, what in enumerate(self.config.whats):
            yield TroubleTask(TroubleData(prompt=f"{what} {number}", what=what), self.config.task)


__all__ = ["TroubleTaskset"]
"""
