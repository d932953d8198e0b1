"""`colibri-cluster chat`: a conversation in the terminal, or from a pipe; described in docs/chat.md.

lines ──(a message, a command)──▶ loop.Chat ──submit, next_event──▶ cluster
                                    └─ conversation: what has been said; keeping: files that it is saved to
"""

from colibri_mp.chat.loop import Chat

__all__ = ["Chat"]
