"""`torchrun`, unchanged, with the agent for tests."""

import runpy

import fake_agent

fake_agent.install()
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
