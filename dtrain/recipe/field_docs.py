"""Documentation of a section's fields, read from the source: the string below each field."""

import ast
import inspect
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, fields of its base classes included."""
    docs = {}
    for owner in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for this, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(this, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(this.target, ast.Name)
                docs[this.target.id] = str(after.value.value)
    return docs
