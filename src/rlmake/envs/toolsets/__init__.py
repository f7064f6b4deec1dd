"""Tool servers that ship: MCP servers that verifiers starts (`python -m rlmake.envs.toolsets.<name>`), one a worker."""
