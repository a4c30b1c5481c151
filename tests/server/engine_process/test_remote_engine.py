"""Which requests the front keeps when its engine process ends."""

from jaxserve.config import EngineConfig
from jaxserve.iteration import Admission
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.engine_process import messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import Splitter
from server.engine_process.job import EngineInfo
from server.engine_process.remote_engine import RemoteEngine
from tests.server.fake_engine import FakeEngine, byte_tokenizer, made_up_record


def test_a_request_without_an_event_goes_to_the_next_engine() -> None:
    """Though it has had a row: its caller has not noticed."""
    fake, sent, told = FakeEngine(tokenizer=byte_tokenizer()), [], []
    info = EngineInfo(report=fake.report, limits=fake.limits, eos_token_ids=(), bos_token_id=None)
    engine = RemoteEngine(EngineConfig(), fake.tokenizer)
    engine.connect(info, sent.append)
    for name in "ab":
        engine.submit(Request(request_id=name, prompt=(97,), sampling=SamplingParams()), told.extend)
    admissions = tuple(
        Admission(
            row=row,
            request_id=name,
            tokens=(97,),
            prompt_length=1,
            blocks=(),
            sampling=SamplingParams(),
            endings=(),
        )
        for row, name in enumerate("ab")
    )
    record = made_up_record(0, (), waiting=0, finished_at=0.0, admissions=admissions)
    frame = messages.encode_iterations(2, [fake.load()], [TokenEvent("a", (1,), (0.0,))], [record])
    (body,) = Splitter().feed(frame)
    engine.take(messages.parse(pb.FromEngine, body)[1].iterations)
    sent.clear()
    engine.disconnect("it died", returns=True)
    assert [(event.request_id, event.error) for event in told] == [("a", None), ("a", "it died")]
    engine.connect(info, sent.append)
    (again,) = [body for frame in sent for body in Splitter().feed(frame)]
    assert messages.parse(pb.FromFront, again)[1].submit.request_id == "b"
