"""Objectives: what an SLO is (`objective`), how it is judged (`judgement`, `statistics`), and what follows (`gate`)."""
