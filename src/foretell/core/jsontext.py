"""JSON from files and options that anybody wrote: whatever is wrong with it is one kind of error."""

import json
from json import JSONDecodeError as JSONDecodeError
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises JSONDecodeError, whose ``msg`` is a line, also where brackets are nested deeper
    than Python's parser reads (some 1,000 of them), a number has thousands of digits, or bytes are no UTF-8."""
    try:
        return json.loads(text)
    except JSONDecodeError:
        raise
    except RecursionError:
        reason = "brackets are nested too deeply"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start})"
    except ValueError as error:
        reason = str(error).partition(";")[0]  # Python's advice on its limit of digits is for programmers
    raise JSONDecodeError(reason, text if isinstance(text, str) else "", 0)
