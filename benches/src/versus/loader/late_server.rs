//! A web server on this machine whose answers come late.

use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower_http::services::ServeDir;

/// Serves the files of a folder until the process ends, each answer so much later.
pub fn start(folder: &Path, late: Duration) -> Result<SocketAddr> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let files = TowerToHyperService::new(ServeDir::new(folder));
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        runtime.block_on(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let files = files.clone();
                let answer = service_fn(move |request| {
                    let files = files.clone();
                    async move {
                        sleep(late).await;
                        hyper::service::Service::call(&files, request).await
                    }
                });
                // A client that goes away is no error.
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(socket), answer));
            }
        });
    });
    Ok(address)
}
