"""Start training as a job of Amazon SageMaker; needs `pip install 'sagemaker<3'` and AWS credentials.

    python scripts/sagemaker/launch.py --role arn:aws:iam::1234:role/sagemaker --bucket my-bucket \
        --training s3://my-bucket/texts --instances 2 --type ml.p4d.24xlarge \
        config=qwen3_0.6b_ul2 max_steps=10000 learning_rate=2e-4

Words with `=` are hyperparameters: settings, in any words that `ds-encdec train` knows. The model is the job's output;
checkpoints go to BUCKET/checkpoints/JOB, from where a spot job, or another one with the same --name, goes on.

Not tried on AWS: the tests make the container's folders and variables.
"""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Build the estimator and start the job; returns when it has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", required=True, help="IAM role of the job")
    parser.add_argument("--bucket", required=True, help="S3 bucket for checkpoints and the model")
    parser.add_argument("--name", default="ds-encdec", help="of the job, and of its checkpoints")
    parser.add_argument("--training", help="S3 folder of the data, of one kind of files")
    parser.add_argument("--validation", help="S3 folder of what is evaluated on")
    parser.add_argument("--type", default="ml.p4d.24xlarge", help="kind of instance")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--spot", action="store_true", help="instances that may be taken away: the job goes on later")
    parser.add_argument("--hours", type=float, default=24, help="most that the job may run")
    parser.add_argument("--image", help="of a container with torch 2.11 or newer; needed until AWS has one")
    parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args()

    from sagemaker.pytorch import PyTorch

    seconds = int(options.hours * 3600)
    estimator = PyTorch(
        entry_point="ds_encdec/train.py",
        source_dir=str(ROOT),
        dependencies=[],
        role=options.role,
        image_uri=options.image,
        framework_version=None if options.image else "2.11",
        py_version=None if options.image else "py312",
        instance_type=options.type,
        instance_count=options.instances,
        distribution={"torch_distributed": {"enabled": True}},
        hyperparameters=dict(word.split("=", 1) for word in options.hyperparameters),
        base_job_name=options.name,
        checkpoint_s3_uri=f"s3://{options.bucket}/checkpoints/{options.name}",
        output_path=f"s3://{options.bucket}/models",
        use_spot_instances=options.spot,
        max_run=seconds,
        max_wait=2 * seconds if options.spot else None,
    )
    channels = {"training": options.training, "validation": options.validation}
    estimator.fit({name: uri for name, uri in channels.items() if uri} or None)


if __name__ == "__main__":
    main()
