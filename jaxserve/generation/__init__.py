"""On top of `Engine.submit`: a caller's words read into requests, several samples and beams of them, and the engine's
events assembled into completions. No array is touched here."""
