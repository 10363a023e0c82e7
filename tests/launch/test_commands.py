"""What a program that failed says is shown from its first line of an error."""

import sys

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.commands import run

TERRAFORM = """
╷
│ Error: Backend initialization required, please run "terraform init"
│
│ Reason: Initial configuration of the requested backend "gcs"
│
│ The "backend" is the interface that Terraform uses to store state,
│ perform operations, etc. If the change reason above is incorrect,
╵
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            TERRAFORM,
            'failed \\(1\\): Error: .*please run "terraform init" Reason: Initial',
        ),
        ("a\nb\nERROR: (gcloud) no such\nproject\n", r"failed \(1\): ERROR: \(gcloud\) no such project"),
        ("1\n2\n3\n4\n5\n", r"failed \(1\): 2 3 4 5"),
    ],
)
def test_the_first_line_of_an_error_is_shown(text: str, shown: str) -> None:
    with pytest.raises(EnvironmentFault, match=shown):
        run([sys.executable, "-c", f"import sys; sys.stderr.write({text!r}); sys.exit(1)"])
