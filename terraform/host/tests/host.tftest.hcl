variables {
  bucket = "my-runs"
  wheel  = "gs://my-runs/launch/0/dtrain-0.1.0-py3-none-any.whl"
  lock   = "gs://my-runs/launch/0/lock.txt"
}

run "instances_have_no_timer" {
  command = plan
  assert {
    condition     = !strcontains(output.script, "systemd-run") && strcontains(output.script, "--require-hashes")
    error_message = "Compute Engine deletes instances; the lock file has hashes"
  }
}

run "the_run_ends_before_its_machine" {
  command = plan
  variables {
    hours = 1
  }
  assert {
    condition     = output.launch.hours == 0.75 && output.launch.wheel == var.wheel
    error_message = "the limit of the run and the wheel of its host"
  }
}

run "a_tpu_node_has_one" {
  command = plan
  variables {
    tpu   = "projects/my-project/locations/us-east5-b/nodes/n"
    hours = 1.5
  }
  assert {
    condition     = strcontains(output.script, "+ 90 * 60") && strcontains(output.script, "https://tpu.googleapis.com/v2/projects/my-project/locations/us-east5-b/nodes/n")
    error_message = "the node outlives its limit"
  }
}

run "no_limit_is_no_timer" {
  command = plan
  variables {
    tpu = "projects/my-project/locations/us-east5-b/nodes/n"
  }
  assert {
    condition     = !strcontains(output.script, "systemd-run") && output.launch.hours == null
    error_message = "it would be deleted"
  }
}

run "a_wheel_is_in_a_bucket" {
  command = plan
  variables {
    wheel = "dist/dtrain.whl"
  }
  expect_failures = [var.wheel]
}

run "nothing_is_quoted_out" {
  command = plan
  variables {
    bucket = "a' rm"
  }
  expect_failures = [var.bucket]
}
