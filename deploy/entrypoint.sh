#!/bin/sh
# Of the image: what Spark starts in pods (executor, driver), and `delivered` for everything else.
set -eu

: "${SPARK_HOME:=$(python -c 'import pyspark, os; print(os.path.dirname(pyspark.__file__))')}"
export SPARK_HOME
export PYSPARK_PYTHON="${PYSPARK_PYTHON:-python}" PYSPARK_DRIVER_PYTHON="${PYSPARK_DRIVER_PYTHON:-python}"

case "${1:-}" in
  executor)
    # Spark numbers the JVM's options: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ... One may hold blanks.
    set --
    number=0
    while eval "[ -n \"\${SPARK_JAVA_OPT_$number+set}\" ]"; do
      eval "set -- \"\$@\" \"\${SPARK_JAVA_OPT_$number}\""
      number=$((number + 1))
    done
    exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "$@" \
      "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
      -cp "${SPARK_CONF_DIR:-}:${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  driver)
    # A driver that `spark-submit --deploy-mode cluster` put into a pod.
    shift
    exec "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
      --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
    ;;
  *)
    exec delivered "$@"
    ;;
esac
