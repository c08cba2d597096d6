{{- define "quiver.fullname" -}}
{{- if contains "quiver" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-quiver" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quiver.selector" -}}
app.kubernetes.io/name: quiver
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quiver.labels" -}}
{{ include "quiver.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The host name of every node behind the headless service, without the pod's own name. */ -}}
{{- define "quiver.domain" -}}
{{ include "quiver.fullname" . }}-headless.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- /* The managers that form the cluster: the pod name-0 is node 1. */ -}}
{{- define "quiver.join" -}}
{{- $root := . -}}
{{- $managers := list -}}
{{- range $ordinal := until (int (min .Values.managers .Values.replicas)) -}}
{{- $managers = append $managers (printf "%d@%s-%d.%s:9002" (add1 $ordinal) (include "quiver.fullname" $root) $ordinal (include "quiver.domain" $root)) -}}
{{- end -}}
{{- join "," $managers -}}
{{- end -}}

{{- /* The names by which clients reach the gateways, besides the nodes' own. */ -}}
{{- define "quiver.hosts" -}}
{{- $name := include "quiver.fullname" . -}}
{{- list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.%s" $name .Release.Namespace .Values.clusterDomain) | join "," -}}
{{- end -}}

{{- define "quiver.scheme" -}}
{{- if .Values.security.insecure -}}HTTP{{- else -}}HTTPS{{- end -}}
{{- end -}}

{{- define "quiver.check" -}}
{{- if and (not .Values.security.insecure) (not .Values.security.existingSecret) -}}
{{- fail "set security.existingSecret to the secret with the certificates (docs/operations/kubernetes.md has the commands that make it), or security.insecure=true on a closed network" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.security.insecure) (not .Values.serviceMonitor.tokenSecret.name) -}}
{{- fail "set serviceMonitor.tokenSecret.name to the secret with the token of a user that may read the cluster" -}}
{{- end -}}
{{- end -}}
