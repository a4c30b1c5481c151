# /// script
# dependencies = ["tritonclient[http,grpc]==2.73.0"]
# ///
"""Triton's clients over HTTP and gRPC: readiness, metadata, inference, and a stream."""

import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

TEXTS = np.array([[b"It was a"], [b"She was"]], object)
PARAMETERS = {"max_tokens": 4, "temperature": 0}

answers = []
for kind, url in ((tritonclient.http, sys.argv[1].removeprefix("http://")), (tritonclient.grpc, sys.argv[3])):
    client = kind.InferenceServerClient(url)
    assert client.is_server_live()
    assert client.is_model_ready("demo")
    assert "text_input" in str(client.get_model_metadata("demo"))
    given = kind.InferInput("text_input", [2, 1], "BYTES")
    given.set_data_from_numpy(TEXTS)
    wanted = [kind.InferRequestedOutput("text_output"), kind.InferRequestedOutput("completion_tokens")]
    answer = client.infer("demo", [given], outputs=wanted, parameters=PARAMETERS)
    assert answer.as_numpy("completion_tokens").tolist() == [[4], [4]]
    answers.append(answer.as_numpy("text_output").tolist())
    told = None
    try:
        client.infer("other", [given])
    except tritonclient.utils.InferenceServerException as refused:
        told = str(refused)
    assert told is not None, "a model that is not served answers"
    assert "other" in told
assert answers[0] == answers[1], answers

events = queue.Queue()
client.start_stream(lambda result, error: events.put((result, error)))
one = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
one.set_data_from_numpy(TEXTS[0])
client.async_stream_infer("demo", [one], parameters=PARAMETERS)
text, is_last = b"", False
while not is_last:
    result, error = events.get(timeout=60)
    assert error is None, error
    is_last = result.get_response().parameters["triton_final_response"].bool_param
    if (piece := result.as_numpy("text_output")) is not None:
        text += piece[0]
client.stop_stream()
assert text == answers[0][0][0], (text, answers)
