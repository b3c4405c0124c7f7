"""A LiveKit agent that speaks: LiveKit has microphones and speakers, omni_cluster answers by voice."""

import os

from livekit.agents import Agent, AgentServer, AgentSession, ConversationItemAddedEvent, JobContext, cli
from livekit.plugins import openai

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
API_KEY = os.environ.get("API_KEY", "none")
MODEL = os.environ.get("MODEL", "preset:toy")

server = AgentServer()


@server.rtc_session()
async def talk(job: JobContext) -> None:
    model = openai.realtime.RealtimeModel(model=MODEL, base_url=f"{BASE_URL}/v1", api_key=API_KEY)
    session = AgentSession(llm=model)

    @session.on("conversation_item_added")
    def said(event: ConversationItemAddedEvent) -> None:
        if event.item.type == "message":
            print(f"{event.item.role}: {event.item.text_content}", flush=True)

    await session.start(agent=Agent(instructions="Be brief."), room=job.room)


if __name__ == "__main__":
    cli.run_app(server)
