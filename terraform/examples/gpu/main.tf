# Hosts with eight H100 each, for `launch: {kind: ssh}`. No host has a public IP: ssh goes through Identity-Aware Proxy.
#
#   gcloud storage buckets create gs://my-state --location us-east5 --uniform-bucket-level-access   # once; see README.md
#   gcloud storage buckets update gs://my-state --versioning
#   uv build --wheel
#   uv pip compile pyproject.toml --extra cuda --extra all -c constraints.txt --generate-hashes --python-version 3.12 \
#     --python-platform x86_64-manylinux_2_31 -o dist/lock.txt
#   cd terraform/examples/gpu
#   terraform init -backend-config=bucket=my-state
#   terraform apply -var project=my-project -var bucket=my-runs -var owner=ada -var user=ada \
#     -var wheel=$(ls ../../../dist/*.whl) -var lock=../../../dist/lock.txt
#   sh -ec "$(terraform output -raw setup)"
#   cd - && dtrain launch up recipe.yaml --terraform terraform/examples/gpu
#   terraform -chdir=terraform/examples/gpu destroy ...   # with the same -var; leaves the bucket and the runs in it
#
# `up` waits until every host has written its ready file. After `hours` the machines are deleted, whatever runs on them.

terraform {
  required_version = ">= 1.9"
  backend "gcs" {
    prefix = "dtrain/gpu"
  }
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 7.45"
    }
  }
}

provider "google" {
  project = var.project
  region  = local.region
}

locals {
  region = join("-", slice(split("-", var.zone), 0, 2))
  labels = merge(var.labels, { owner = var.owner, run = var.name })
}

module "network" {
  source  = "../../network"
  project = var.project
  region  = local.region
  name    = var.name
}

module "service_account" {
  source  = "../../service_account"
  project = var.project
  name    = var.name
}

module "bucket" {
  source  = "../../bucket"
  project = var.project
  region  = local.region
  name    = var.bucket
  stack   = var.name
  create  = var.create_bucket
  labels  = local.labels
  writers = { hosts = module.service_account.member }
  files   = { wheel = var.wheel, lock = var.lock }
}

module "gpu" {
  source          = "../../gpu"
  machine         = var.machine
  hosts           = var.hosts
  spot            = var.spot
  reservation     = var.reservation
  project         = var.project
  zone            = var.zone
  name            = var.name
  labels          = local.labels
  network         = module.network.network
  subnetwork      = module.network.subnetwork
  service_account = module.service_account.email
  bucket          = module.bucket.bucket
  wheel           = module.bucket.files["wheel"]
  lock            = module.bucket.files["lock"]
  user            = var.user
  hours           = var.hours
}
