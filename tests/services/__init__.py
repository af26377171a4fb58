"""Real servers for tests and studies: Apache Kafka and Redis, each on ports of its own.

Every class here works without pytest::

    with KafkaBroker() as kafka, RedisServer() as redis:
        ...  # kafka.bootstrap, redis.url

A server never outlives the process that started it, however that process ends.
"""
