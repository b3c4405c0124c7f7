"""A Pipecat bot that speaks: Pipecat has the transport, omni_cluster answers by voice.

It waits for a client on ws://127.0.0.1:8765, such as speak.py, and ends when that leaves.
"""

import asyncio
import os

from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.websocket.server import SingleClientWebsocketServerParams, SingleClientWebsocketServerTransport
from pipecat.workers.runner import WorkerRunner

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
API_KEY = os.environ.get("API_KEY", "none")
MODEL = os.environ.get("MODEL", "preset:toy")
PORT = int(os.environ.get("PORT", "8765"))
RATE_HZ = 24_000


def service():
    settings = OpenAIRealtimeLLMService.Settings(
        model=MODEL, session_properties=SessionProperties(instructions="Be brief.")
    )
    url = f"{BASE_URL.replace('http', 'ws', 1)}/v1/realtime"
    return OpenAIRealtimeLLMService(api_key=API_KEY, base_url=url, settings=settings)


async def main():
    params = SingleClientWebsocketServerParams(
        serializer=ProtobufFrameSerializer(), audio_in_enabled=True, audio_out_enabled=True
    )
    transport = SingleClientWebsocketServerTransport(params, host="127.0.0.1", port=PORT)
    context = LLMContextAggregatorPair(LLMContext())
    pipeline = Pipeline([transport.input(), context.user(), service(), transport.output(), context.assistant()])
    worker = PipelineWorker(
        pipeline, params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ)
    )

    @context.assistant().event_handler("on_assistant_turn_stopped")
    async def said(_, message):
        print(f"{message.content}{' [interrupted]' if message.interrupted else ''}", flush=True)

    @transport.event_handler("on_websocket_ready")
    async def ready(_):
        print(f"ready on ws://127.0.0.1:{PORT}", flush=True)

    @transport.event_handler("on_client_disconnected")
    async def left(*_):
        await worker.cancel()

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await runner.run()


asyncio.run(main())
