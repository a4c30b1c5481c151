# /// script
# dependencies = ["cohere==7.3.1"]
# ///
"""Cohere's client: documents ranked, by both versions of its API."""

import sys

import cohere

documents = ["The weather was fine.", "Elizabeth danced with Mr. Darcy.", "They went to the sea."]
for kind in (cohere.Client, cohere.ClientV2):
    client = kind(api_key="none", base_url=sys.argv[1])
    answer = client.rerank(model="demo", query="Mr. Darcy was proud.", documents=documents, top_n=2)
    assert [result.index for result in answer.results] == [1, 2], (kind, answer)
    assert 0 < answer.results[1].relevance_score < answer.results[0].relevance_score < 1
