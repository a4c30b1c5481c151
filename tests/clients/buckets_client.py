# /// script
# dependencies = ["s3fs==2026.7.0", "gcsfs==2026.7.0", "moto[server]==5.2.5", "gcp-storage-emulator==2026.7.19"]
# ///
"""s3fs and gcsfs: `--model s3://...` and `gs://...` take a checkpoint from stand-ins of both stores."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gcsfs would ask for the kind of bucket over gRPC, with TLS

import gcsfs
import s3fs
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer

ROOT = Path(__file__).parents[2]
generate = [sys.argv[4], "-m", "server.commands.cli", "generate", "--prompt", "It was a", "--max-tokens", "4"]
generate += ["--buckets", "8", "--max-rows", "1", "--no-scoring"]  # few programs

amazon = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
amazon.start()
google = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
google.start()
try:
    os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*amazon.get_host_and_port())
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "none"
    os.environ["STORAGE_EMULATOR_HOST"] = "http://{}:{}".format(*google._api._httpd.server_address)
    stores = {"s3": s3fs.S3FileSystem(), "gs": gcsfs.GCSFileSystem(token="anon")}
    stores["s3"].mkdir("bucket")
    with tempfile.TemporaryDirectory() as cache:
        for store, files in stores.items():
            for path in (ROOT / "jaxserve" / "demo").iterdir():
                if path.is_file():
                    files.put_file(str(path), f"bucket/demo/{path.name}")
            done = subprocess.run(
                [*generate, "--model", f"{store}://bucket/demo"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": sysconfig.get_path("purelib"), "XDG_CACHE_HOME": cache},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert f"{store}://bucket/demo: downloading" in done.stderr, done.stderr
            assert done.stdout.strip(), done.stderr
finally:
    amazon.stop()
    google.stop()
