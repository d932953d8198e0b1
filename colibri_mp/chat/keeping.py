"""The files of a chat: FILE is the conversation, FILE.kv what the cluster has computed for it.

The second one only saves time: without it, or if it is of another model or setting, the prompt is computed again.
"""

from pathlib import Path

from colibri_mp.chat.conversation import Conversation
from colibri_mp.client import Cluster
from colibri_mp.config import format_size
from colibri_mp.errors import RequestError, SessionError, WriteError
from colibri_mp.messages import Conversation as Prompt


def kv_path(path: Path) -> Path:
    """Where the KV of a conversation is."""
    return path.with_name(path.name + ".kv")


def save(cluster: Cluster, conversation: Conversation, path: Path) -> str:
    """Write both files; returns what there is to say of it.

    Raises:
        WriteError: the conversation cannot be written.
    """
    conversation.save(path)
    said = f"saved {len(conversation.messages)} messages to {path}"
    kv_path(path).unlink(missing_ok=True)  # of what was saved here before
    if not conversation.messages:
        return said
    try:
        saved = cluster.save_session(Prompt(conversation.prompt(), add_generation_prompt=False), kv_path(path))
    except (SessionError, RequestError, WriteError) as error:
        return f"{said}, but not what was computed for them: {error}"
    return f"{said}; {saved.num_tokens} computed tokens of {saved.num_asked} to {kv_path(path)}, {format_size(saved.num_bytes)}"


def load(cluster: Cluster, path: Path) -> tuple[Conversation, str]:
    """The conversation, and what there is to say of it.

    Raises:
        ConfigError: there is no conversation in this file.
    """
    conversation = Conversation.load(path)
    said = f"{len(conversation.messages)} messages of {path}"
    if not kv_path(path).exists():
        return conversation, f"{said}; what was computed for them is not there: the next answer begins later"
    try:
        restored = cluster.restore_session(kv_path(path))
    except (SessionError, RequestError) as error:
        return conversation, f"{said}; {error} (the next answer begins later)"
    return conversation, f"{said}; {restored.num_tokens} tokens need not be computed again"
