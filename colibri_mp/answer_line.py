"""One line for people about an answer."""

from typing import Any

from colibri_mp.config import format_size


def describe_answer(reason: str, stats: dict[str, Any], memory: dict[str, Any] | None = None) -> str:
    """What an answer cost: tokens, speed, experts, and the memory if that is given; `stats` as in `client.Completion`."""
    cache = stats["cache"]
    cached = f", {stats['cached_tokens']} of them cached" if stats.get("cached_tokens") else ""
    parts = [
        f"{stats['completion_tokens']} tokens, {stats['decode_tok_s']:.1f} tok/s",
        f"first after {stats['ttft_s']:.2f} s ({stats['prompt_tokens']} prompt tokens{cached})",
        f"experts {cache['hit_rate']:.0%} from memory, {format_size(cache['bytes_read'])} read",
    ]
    if memory is not None:
        parts.append(f"memory {format_size(memory['peak_bytes'])} of {format_size(memory['budget_bytes'])}")
    return f"[{'; '.join(parts)}; ended: {reason}]"
