"""The choice of each row's next token from its logits, and logprobs of tokens that are known already."""
