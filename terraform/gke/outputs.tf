locals {
  context = "gke_${var.project}_${var.region}_${google_container_cluster.this.name}"
  kubectl = "kubectl --context ${local.context}"
  apply   = "${local.kubectl} apply -f -"
  setup = [
    "gcloud container clusters get-credentials ${google_container_cluster.this.name} --region ${var.region} --project ${var.project}",
    "${local.kubectl} apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/${var.jobset}/manifests.yaml",
    "${local.kubectl} create namespace ${var.pods.namespace} --dry-run=client -o yaml | ${local.apply}",
    "${local.kubectl} create serviceaccount ${var.pods.account} --namespace ${var.pods.namespace} --dry-run=client -o yaml | ${local.apply}",
    "${local.kubectl} annotate serviceaccount ${var.pods.account} --namespace ${var.pods.namespace} --overwrite iam.gke.io/gcp-service-account=${var.service_account}",
    "${local.kubectl} --namespace jobset-system rollout status deployment/jobset-controller-manager --timeout 10m",
  ]
}

output "launch" {
  description = "The keys of the recipe's `launch` section that depend on the cluster."
  value = {
    kind      = "gke"
    context   = local.context
    namespace = var.pods.namespace
    account   = var.pods.account
    hours     = var.hours == null ? null : var.hours - min(0.5, var.hours / 4) # the run ends before its nodes
  }
}

output "principal" {
  description = "The pods' IAM member, for `writers` of the module `bucket`; known once the cluster exists."
  value       = "principal://iam.googleapis.com/projects/${data.google_project.this.number}/locations/global/workloadIdentityPools/${google_container_cluster.this.workload_identity_config[0].workload_pool}/subject/ns/${var.pods.namespace}/sa/${var.pods.account}"
}

output "setup" {
  description = "Commands to run once: credentials for kubectl, JobSet, the Kubernetes service account."
  value       = join("\n", local.setup)
}
