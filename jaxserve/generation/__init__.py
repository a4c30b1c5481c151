"""Generation on top of `Engine.submit`: requests, samples, beams and completions."""
