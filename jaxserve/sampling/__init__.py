"""Sampling of next tokens from logits, and logprobs of given tokens."""
