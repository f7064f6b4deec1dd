"""The tool of the taskset phone-book."""

import verifiers.v1 as vf

from rlmake.envs.made import phone_book as rules


class PhoneBook(vf.Toolset[vf.SharedToolsetConfig]):
    """`look_up`, under that very name."""

    TOOL_PREFIX = None

    @vf.tool
    async def look_up(self, name: str) -> str:
        return rules.look_up(name)

    look_up.__doc__ = rules.DESCRIPTION


if __name__ == "__main__":
    PhoneBook.run()
