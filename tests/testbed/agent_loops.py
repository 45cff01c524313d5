"""An agent loop of a user's own: it asks for two drafts at once, then works as verl's with its tools; some of its runs
fail. verl loads it with `agent_loops.yaml`, when the first trajectory begins.
"""

import asyncio
from uuid import uuid4

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop


class DraftingAgent(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs):
        if kwargs["session_id"] in (1, 2):
            prompt = self.tokenizer.apply_chat_template(list(kwargs["raw_prompt"]), return_dict=False)
            drafts = (
                self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=list(prompt), sampling_params=sampling_params
                )
                for _ in range(2)
            )
            await asyncio.gather(*drafts)
        if kwargs["session_id"] == 2 and kwargs["extra_info"]["index"] % 4 == 0:
            raise LookupError("no draft is any good")
        return await super().run(sampling_params, **kwargs)
