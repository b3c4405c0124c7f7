"""What is promised of a stream: a replica of any stage dies, and its client gets the answer that it would have had."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
import ray
from ray import serve
from ray.serve._private.common import DeploymentID

from omni_cluster.cluster.serve_private import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from tests.chaos.soak import nothing_is_left
from tests.served.app import ServedApp, until
from tests.served.recovering import (
    REPLACED_S,
    Moment,
    Recovering,
    is_ready,
    kill_replica,
    much_sound,
    much_text,
    says_whether_it_is_ready,
    sound_begins,
    text_begins,
    until_made,
)

MOST_CODES = 2000
"""That any of the applications takes."""


def need_one_replica(stage: str) -> None:
    """Tells Serve's controller what its autoscaler would, which waits until the load was low for half a minute."""
    controller, of = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), DeploymentID(stage, "default")
    ray.get(controller.__ray_call__.remote(lambda self: self.deployment_state_manager.set_target_num_replicas(of, 1)))


class RecoveryPromises:
    """Of an application with text and sound in three stages, two replicas of each; one of the first stage stands by."""

    async def test_a_stream_goes_on_while_serve_s_controller_is_killed(self, recovering: Recovering) -> None:
        """The later tests see that what is lost then is replaced."""

        async def kill_controller(app: ServedApp, _: str) -> None:
            app.actor("ServeController").kill()
            assert await says_whether_it_is_ready() in (200, 503)

        assert await recovering.survives(recovering.body(), (much_sound, kill_controller, "")) == {}
        await until(lambda: is_ready(recovering.app), "the next controller knows the replicas")

    async def test_streams_go_on_and_begin_while_ray_s_gcs_does_not_answer(self, recovering: Recovering) -> None:
        """As while it is gone, until Ray gives up after a minute."""
        gcs, long, short = recovering.app.part_of_ray("gcs_server"), recovering.body(), recovering.short_body()

        async def stop_gcs(app: ServedApp, _: str) -> None:
            gcs.suspend()
            assert await says_whether_it_is_ready() == 200

        expected = await recovering.undisturbed(long), await recovering.undisturbed(short)
        await recovering.are_there(recovering.app.stages)
        await until(lambda: is_ready(recovering.app), "all stages are known")
        try:
            heard = [
                await recovering.answer_with(long, (much_sound, stop_gcs, "")),
                await recovering.answer_with(short),
            ]
            assert await says_whether_it_is_ready() == 200
        finally:
            gcs.resume()
        for heard_meanwhile, wanted in zip(heard, expected, strict=True):
            recovering.assert_same(heard_meanwhile, wanted)
        await until(lambda: nothing_is_left(recovering.app), "all replicas let go of the requests")

    async def test_a_replica_that_stands_by_gets_no_request_while_another_lives(self, recovering: Recovering) -> None:
        """The tests that kill replicas of the first stage see that it gets them then."""
        first, short = recovering.app.stages[0], recovering.short_body()
        await recovering.are_there({first})
        await asyncio.gather(*(recovering.answer_with(short) for _ in range(2)))  # the ingress has heard of both by now
        before = await recovering.requests_of(first)
        await asyncio.gather(*(recovering.answer_with(short) for _ in range(6)))
        after = await recovering.requests_of(first)
        assert [after[each] - before[each] for each in sorted(after)] == [6, 0]

    @pytest.mark.parametrize(
        ("place", "moment"),
        [(0, text_begins), (1, sound_begins), (2, sound_begins), (0, much_text), (1, much_sound), (2, much_sound)],
    )
    async def test_a_stream_goes_on_when_a_replica_is_killed(
        self, recovering: Recovering, place: int, moment: Moment
    ) -> None:
        stage = recovering.app.stages[place]
        assert await recovering.survives(recovering.body(), (moment, kill_replica, stage)) == {stage: 1}

    async def test_serve_s_proxy_is_killed_and_comes_again(self, recovering: Recovering) -> None:
        """The connections are its own, and end with it."""

        async def kill_proxy(app: ServedApp, _: str) -> None:
            app.actor("ProxyActor").kill()

        with pytest.raises(httpx.TransportError):
            await recovering.answer_with(recovering.body(), (sound_begins, kill_proxy, ""))
        await until(lambda: nothing_is_left(recovering.app), "all replicas let go of the request")
        await until(lambda: is_ready(recovering.app), "another proxy serves", REPLACED_S)

    async def test_a_stream_goes_on_when_replicas_of_two_stages_are_killed(self, recovering: Recovering) -> None:
        """The second once the answer went on."""
        _, second, third = recovering.app.stages
        before = await recovering.recoveries()

        async def kill_once_it_went_on(app: ServedApp, stage: str) -> None:
            async def went_on() -> bool:
                return (await recovering.recoveries())[second] > before[second]

            await until(went_on, "the answer goes on with another replica")
            await kill_replica(app, stage)

        kills = (much_sound, kill_replica, second), (much_sound, kill_once_it_went_on, third)
        assert await recovering.survives(recovering.body(), *kills) == {second: 1, third: 1}

    @pytest.mark.parametrize("place", [0, 1])
    async def test_a_stream_goes_on_when_a_replica_is_killed_that_had_made_its_part(
        self, recovering: Recovering, place: int
    ) -> None:
        async def kill_once_made(app: ServedApp, stage: str) -> None:
            await until_made(app, stage)
            await kill_replica(app, stage)

        stage = recovering.app.stages[place]
        await recovering.survives(recovering.body(), (text_begins, kill_once_made, stage))

    async def test_streams_of_a_replica_that_is_no_longer_needed_end_where_they_are(
        self, recovering: Recovering
    ) -> None:
        """The last test: one replica of the last stage is left. Streams are longer: the controller may be slow."""
        app, _, second, last = recovering.app, *recovering.app.stages
        longer = min(2 * recovering.lengths[second], MOST_CODES)
        asked = replace(recovering, lengths={**recovering.lengths, second: longer}).body()
        await recovering.are_there({last})
        expected, before = await recovering.undisturbed(asked), await recovering.recoveries()
        await until(lambda: nothing_is_left(app), "earlier requests are gone")
        answers = [asyncio.create_task(recovering.answer_with(asked)) for _ in range(2)]

        async def have_one_each() -> bool:
            return [status["open_outboxes"] for status in await app.living(last)] == [1, 1]

        async def goes() -> bool:
            return "STOPPING" in serve.status().applications["default"].deployments[last].replica_states

        await until(have_one_each, "both replicas have one of the streams")
        await asyncio.to_thread(need_one_replica, last)
        await until(goes, "one of them is told to go")
        assert not any(answer.done() for answer in answers)
        for answer in answers:
            recovering.assert_same(await answer, expected)
        assert await recovering.recoveries() == before

        async def one_is_left() -> bool:
            return app.replicas(last) == 1 and await nothing_is_left(app)

        await until(one_is_left, "it goes once its stream has ended")
