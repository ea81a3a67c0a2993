"""The gateway: OpenAI-compatible HTTP sessions, one per row, in a rollout worker's process.

client ──HTTP──▶ app.py ──▶ SessionTable ──token──▶ Session (meshrl.rollout.agents) ──▶ engine
│              ▲
│              └── the program `openai` opens and closes sessions
└── POST /v1/sessions: a row for an external agent
"""
