# /// script
# dependencies = ["guidellm==0.3.1"]
# ///
"""guidellm: made-up prompts; every request is answered with the tokens that it asks for.

Later versions need torch; 0.8.1 was tried by hand.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS, TOKENS = 20, 16
tokenizer = Path(__file__).parents[2] / "jaxserve" / "demo"
guidellm = Path(sys.executable).with_name("guidellm")
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    subprocess.run(
        [
            *(guidellm, "benchmark", "--target", sys.argv[1], "--disable-progress", "--output-path", report),
            *("--rate-type", "concurrent", "--rate", "4", "--max-requests", str(REQUESTS)),
            *("--data", f"prompt_tokens=32,output_tokens={TOKENS}", "--processor", tokenizer),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
assert benchmark["request_totals"] == {"successful": REQUESTS, "incomplete": 0, "errored": 0, "total": REQUESTS}
tokens = benchmark["metrics"]["output_token_count"]["successful"]
assert (tokens["min"], tokens["max"]) == (TOKENS, TOKENS)
