{{/* What `serve` is given: the configuration, and what these pods have for it. */}}
{{- define "omni.serve" -}}
{{- $config := include "omni.config" . | fromYaml -}}
{{- $ingresses := dict "label_selector" (dict "role" "ingress") -}}
{{- $added := dict "cache_dir" "/var/cache/omni_cluster" "api" (dict "keys_variable" "OMNI_API_KEYS") "ingress_placement" $ingresses -}}
{{- $stages := list -}}
{{- range $stage := $config.stages -}}
  {{- $pool := include "omni.poolOf" (list $ $stage.model_stage) -}}
  {{- $placement := dict "placement" (dict "label_selector" (dict "role" $pool)) -}}
  {{- $stages = append $stages (merge (dict "advanced" $placement) $stage) -}}
{{- end -}}
{{- $config = merge (dict "advanced" $added "stages" $stages) $config -}}
{{- $application := dict "name" "omni" "route_prefix" "/" "import_path" "deployments:app" "args" (dict "config" $config) -}}
# HeadOnly would leave all workers NotReady: their probe asks for a proxy.
proxy_location: EveryNode
# No request_timeout_s: limits.request_timeout_s ends a request in all stages.
http_options: {host: 0.0.0.0, port: 8000}
{{ dict "applications" (list $application) | toYaml }}
{{- end }}

{{/* The configuration, as YAML. */}}
{{- define "omni.config" -}}
{{- $config := .Values.config -}}
{{- if kindIs "string" $config -}}{{- $config = fromYaml $config -}}{{- end -}}
{{- if $config.Error -}}{{- fail (printf "config: it is no YAML: %s" $config.Error) -}}{{- end -}}
{{- if not $config.stages -}}
  {{- fail "config: it has no stages. Give a file of stage_configs: --set-file config=FILE." -}}
{{- end -}}
{{- $all := include "omni.flat" $config | fromYaml -}}
{{- $longest := ($all.limits | default dict).request_timeout_s | default 600 -}}
{{- if lt (int .Values.drainSeconds) (add 30 (int $longest) | int) -}}
  {{- fail (printf "drainSeconds is %v: a request may take limits.request_timeout_s, %v, and 30 more. Give at least %v." .Values.drainSeconds $longest (add 30 (int $longest))) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* The name of the pool that has a stage; of the chart and the stage's name. */}}
{{- define "omni.poolOf" -}}
{{- $root := index . 0 -}}
{{- $stage := index . 1 -}}
{{- $found := list -}}
{{- range $name, $pool := $root.Values.pools -}}
  {{- if has $stage $pool.stages -}}{{- $found = append $found $name -}}{{- end -}}
{{- end -}}
{{- if ne (len $found) 1 -}}
  {{- fail (printf "pools: the stage %s of config is in %d of them. Name it in stages of one." $stage (len $found)) -}}
{{- end -}}
{{- first $found -}}
{{- end }}

{{/* A stage with its advanced keys beside the others, as YAML; of the configuration and the stage's name. */}}
{{- define "omni.stage" -}}
{{- $config := index . 0 -}}
{{- $name := index . 1 -}}
{{- $names := list -}}
{{- range $stage := $config.stages -}}
  {{- $names = append $names $stage.model_stage -}}
  {{- if eq $stage.model_stage $name -}}{{- include "omni.flat" $stage -}}{{- end -}}
{{- end -}}
{{- if not (has $name $names) -}}
  {{- fail (printf "pools: config has no stage %s. It has %s." $name (join ", " $names)) -}}
{{- end -}}
{{- end }}

{{/* Pods of a pool, as {least, most}; of the configuration and the pool. Without cards it is one. */}}
{{- define "omni.pods" -}}
{{- $config := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $leastCards := 0.0 -}}
{{- $mostCards := 0.0 -}}
{{- $least := 0 -}}
{{- $most := 1 -}}
{{- range $pool.stages -}}
  {{- $stage := include "omni.stage" (list $config .) | fromYaml -}}
  {{- $fixed := add ($stage.num_replicas | default 1) ($stage.standby_replicas | default 0) -}}
  {{- $bounds := $stage.autoscaling | default (dict "min_replicas" $fixed "max_replicas" $fixed) -}}
  {{- $floor := dig "min_replicas" 1 $bounds -}}
  {{- $cards := $stage.num_gpus | default 0 -}}
  {{- include "omni.fits" (list $stage $pool) -}}
  {{- $leastCards = addf $leastCards (mulf $floor $cards) -}}
  {{- $mostCards = addf $mostCards (mulf $bounds.max_replicas $cards) -}}
  {{- if not $cards -}}
    {{- /* Cards that it names are those of one host. */ -}}
    {{- $least = max $least 1 -}}
  {{- else if eq (int ($stage.hosts_per_replica | default 1)) 1 -}}
    {{- /* A replica is not split over pods, nor its part of a card over cards. */ -}}
    {{- $ofPod := floor (divf $pool.gpus $cards) -}}
    {{- if lt (float64 $cards) 1.0 -}}{{- $ofPod = mulf $pool.gpus (floor (divf 1 $cards)) -}}{{- end -}}
    {{- $least = max $least (ceil (divf $floor $ofPod)) -}}
    {{- $most = max $most (ceil (divf $bounds.max_replicas $ofPod)) -}}
  {{- end -}}
{{- end -}}
{{- if $pool.gpus -}}
least: {{ max $least (ceil (divf $leastCards $pool.gpus)) }}
most: {{ max $most (ceil (divf $mostCards $pool.gpus)) }}
{{- else -}}
least: 1
most: 1
{{- end -}}
{{- end }}

{{/* Fails for a stage with cards that no pod of its pool has; of the stage and the pool. */}}
{{- define "omni.fits" -}}
{{- $stage := index . 0 -}}
{{- $gpus := int ((index . 1).gpus | default 0) -}}
{{- $cards := $stage.num_gpus | default 0 -}}
{{- if and (gt (float64 $cards) (float64 $gpus)) (eq (int ($stage.hosts_per_replica | default 1)) 1) -}}
  {{- fail (printf "pools: a replica of the stage %s takes num_gpus %v of one pod, and a pod of its pool has gpus %d. Give the pool as many." $stage.model_stage $cards $gpus) -}}
{{- end -}}
{{- range $stage.gpus -}}
  {{- if ge (int .) $gpus -}}
    {{- fail (printf "pools: the stage %s names GPU %v in gpus, and a pod of its pool has gpus %d, the first of which is 0. Give the pool more, or the stage num_gpus." $stage.model_stage . $gpus) -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* Keys with those under advanced beside them, as YAML. */}}
{{- define "omni.flat" -}}
{{- merge (deepCopy .) (.advanced | default dict) | toYaml -}}
{{- end }}
