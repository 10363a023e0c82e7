# A GKE cluster with v6e slices of 16 chips, for `launch: {kind: gke}`, with the repository of the image, and the bucket.
#
#   gcloud storage buckets create gs://my-state --location us-east5 --uniform-bucket-level-access   # once; see README.md
#   gcloud storage buckets update gs://my-state --versioning
#   cd terraform/examples/gke-tpu
#   terraform init -backend-config=bucket=my-state
#   terraform apply -var project=my-project -var bucket=my-runs -var owner=ada -var 'operators={office="203.0.113.0/24"}'
#   sh -ec "$(terraform output -raw setup)"
#   image=$(terraform output -json launch | jq -r .image)
#   cd - && docker build -f launch/Dockerfile --build-arg EXTRA=tpu -t $image . && docker push $image
#   dtrain launch up recipe.yaml --terraform terraform/examples/gke-tpu
#   terraform -chdir=terraform/examples/gke-tpu destroy ...   # with the same -var; leaves the bucket and the runs in it
#
# `gcloud auth configure-docker REGION-docker.pkg.dev` lets docker push. The cluster and its system node are billed until
# destroy, about $6 a day; the accelerators only while a JobSet needs them.

terraform {
  required_version = ">= 1.9"
  backend "gcs" {
    prefix = "dtrain/gke-tpu"
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
  image  = "${local.region}-docker.pkg.dev/${var.project}/${var.name}/dtrain:${var.tag}"
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
  images  = { location = local.region, repository = google_artifact_registry_repository.images.name }
}

module "bucket" {
  source  = "../../bucket"
  project = var.project
  region  = local.region
  name    = var.bucket
  stack   = var.name
  create  = var.create_bucket
  labels  = local.labels
  writers = { nodes = module.service_account.member, pods = module.gke.principal }
}

resource "google_project_service" "images" {
  project            = var.project
  service            = "artifactregistry.googleapis.com"
  disable_on_destroy = false # another stack may need it
}

resource "google_artifact_registry_repository" "images" {
  #checkov:skip=CKV_GCP_84:Google-managed keys are enough for an image without data
  project       = var.project
  location      = local.region
  repository_id = var.name
  format        = "DOCKER"
  labels        = local.labels

  depends_on = [google_project_service.images]
}

module "gke" {
  source          = "../../gke"
  project         = var.project
  region          = local.region
  name            = var.name
  labels          = local.labels
  network         = module.network.network
  subnetwork      = module.network.subnetwork
  service_account = module.service_account.email
  operators       = var.operators
  hours           = var.hours
  pools = {
    v6e = {
      zone        = var.zone
      machine     = "ct6e-standard-4t"
      hosts       = 4
      topology    = "4x4"
      slices      = var.slices
      spot        = var.spot
      reservation = var.reservation
    }
  }
}
