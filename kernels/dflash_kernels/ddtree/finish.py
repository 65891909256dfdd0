"""Where a request ends when one step brings it both a stop and its limit of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def stopped_before_limit(req: Req, new_accepted_len: int) -> bool:
    """Let a request end at a stop that lies before its limit, as without speculation; True when it has.

    SGLang before 0.5.18 looks at the limit first, and a step that crosses it then answers with what follows the stop, up
    to the limit. Called with the step's tokens, ``new_accepted_len`` of them, in ``req.output_ids``, which reach the limit.
    The limit's own token is not looked at: it ends the request by its length, whatever it is.
    """
    before = int(req.sampling_params.max_new_tokens) - 1
    earlier = new_accepted_len - (len(req.output_ids) - before)
    if earlier <= 0 or req.grammar is not None:
        return False
    beyond = req.output_ids[before:]
    del req.output_ids[before:]
    try:
        req.update_finish_state(earlier)
    finally:
        req.output_ids.extend(beyond)
    return bool(req.finished())
