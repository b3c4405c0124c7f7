{{/* What the containers of all pods have; of the chart. */}}
{{- define "omni.container" -}}
image: {{ .Values.image }}
env:
  - {name: HF_HOME, value: /models}
  # On all pods: the application is built on any of them.
  - name: OMNI_API_KEYS
    valueFrom: {secretKeyRef: {name: {{ .Values.apiKeys.secret }}, key: {{ .Values.apiKeys.key }}}}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
# It asks Ray's agent, which answers without the token, of this node and, on the head, of GCS.
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  {{- toYaml .Values.probes.liveness | nindent 2 }}
{{- end }}

{{/* The user of deploy/docker/Dockerfile. */}}
{{- define "omni.user" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}
{{- end }}

{{/* Requests and limits of a container; of its pool. */}}
{{- define "omni.resources" -}}
{{- $amounts := dict "cpu" .cpu "memory" .memory -}}
{{- if .gpus -}}{{- $amounts = set $amounts "nvidia.com/gpu" (.gpus | toString) -}}{{- end -}}
resources:
  {{- dict "requests" $amounts "limits" $amounts | toYaml | nindent 2 }}
{{- end }}
