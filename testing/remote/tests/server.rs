//! An S3 server on the loopback.

use std::net::SocketAddr;
use std::path::Path;
use std::thread;

use anyhow::Result;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::net::TcpListener;

/// The credentials that it asks for.
pub const KEY: (&str, &str) = ("user", "password");

/// Serves the folders of `root` as buckets, until the process ends; with credentials, or to everybody.
pub fn start(root: &Path, with_credentials: bool) -> Result<SocketAddr> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let files = FileSystem::new(root).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let mut service = S3ServiceBuilder::new(files);
    if with_credentials {
        service.set_auth(SimpleAuth::from_single(KEY.0, KEY.1));
    }
    let service = service.build();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        runtime.block_on(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let served =
                        Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service).await;
                    drop(served);
                });
            }
        });
    });
    Ok(address)
}
