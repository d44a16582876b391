"""Adapters in the streamer: asked for by model name, and kept by a stream that outlives its engine."""

import pytest

from protocol.errors import MODEL_NOT_FOUND, RequestRejected


def test_an_adapter_is_asked_for_as_a_model_and_outlives_the_engine(make_rig):
    rig = make_rig(adapters={"fr": "adapters/fr"})
    rig.announce()
    client = rig.client()
    with pytest.raises(RequestRejected, match="use 'tiny', 'fr'") as refusal:
        client.generate("x", model="de").text()
    assert refusal.value.code == MODEL_NOT_FOUND
    streams = client.generate("x", model="fr", max_tokens=3), client.generate("x", model="tiny", max_tokens=3)
    submitted = rig.engine.submit(), rig.engine.submit()
    assert {each.adapter for each in submitted} == {"fr", ""}
    rid = next(each.rid for each in submitted if each.adapter)
    rig.engine.step({rid: 700})
    rig.replace_engine()
    again = rig.engine.submit()
    assert (again.rid, again.adapter) == (rid, "fr")
    for stream in streams:
        stream.cancel()
