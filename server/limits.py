"""Bounds on what one call may send, which are checked before it is parsed."""

MAX_BODY_BYTES = 4 * 2**20  # of an HTTP body and of a gRPC message
MAX_UNFINISHED_BYTES = 16 * MAX_BODY_BYTES  # of all bodies together that are not parsed yet
MAX_VALUES = 2**18  # in the lists and objects of a body, and token ids in a gRPC message
MAX_FIELDS = 2**16  # of a gRPC message, those of messages in it too
MAX_PROMPTS = 1024  # in one call
LONG_BYTES = 2**16  # a longer call is parsed on another thread
MAX_REFUSED_TEXT = 2**20  # bytes of the texts that are looked at together while the queue is full
