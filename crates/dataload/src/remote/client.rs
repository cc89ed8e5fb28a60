//! The client of stores: that of `object_store`, and it counts. Most requests are made again within that crate, so that
//! only a client sees all of them.

use std::time::Duration;

use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};
use tokio::time::timeout;

use super::stats::{FAILED, FETCHED, REQUESTS, count};

/// The most bytes of an answer that is no part of a file: a page of a list has up to 5,000 files, with names of up to
/// 1,024 bytes.
const MAX_ANSWER: usize = 64 << 20;
/// The most bytes of an explanation that a server gives with an error, and the longest that it may take.
const EXPLANATION: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Counting;

impl HttpConnector for Counting {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Counted(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Counted(HttpClient);

impl HttpService for Counted {
    // What `async fn` in this trait stands for.
    fn call<'client, 'answer>(
        &'client self,
        request: HttpRequest,
    ) -> BoxFuture<'answer, Result<HttpResponse, HttpError>>
    where
        'client: 'answer,
        Self: 'answer,
    {
        Box::pin(async move {
            count(&REQUESTS, 1);
            // Whoever asks for a part knows how long it is. All else is read to its end, which may never come.
            let most = if request.headers().contains_key("range") { usize::MAX } else { MAX_ANSWER };
            let answer = self.0.execute(request).await.inspect_err(|_| count(&FAILED, 1))?;
            let status = answer.status().as_u16();
            if matches!(status, 408 | 429 | 500..) {
                count(&FAILED, 1);
            }
            let (head, body) = answer.into_parts();
            if head.status.is_client_error() || head.status.is_server_error() {
                return Ok(HttpResponse::from_parts(head, explanation(body).await.into()));
            }
            let body = body.map_err(|error| {
                count(&FAILED, 1);
                error
            });
            let body = body.map_frame(|frame| {
                count(&FETCHED, frame.data_ref().map_or(0, |bytes| bytes.len() as u64));
                frame
            });
            let body = Limited::new(body, most).map_err(|error| match error.downcast() {
                Ok(error) => *error,
                Err(error) => HttpError::new_boxed(HttpErrorKind::Decode, error),
            });
            Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
        })
    }
}

/// How an explanation begins: the store reads it whole, however long it is, and loses the status where it is no UTF-8.
async fn explanation(mut body: HttpResponseBody) -> String {
    let mut said = Vec::new();
    let read = async {
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(&[][..], |bytes| bytes);
            count(&FETCHED, bytes.len() as u64);
            said.extend_from_slice(&bytes[..bytes.len().min(EXPLANATION - said.len())]);
            if said.len() == EXPLANATION {
                break;
            }
        }
    };
    // Without the rest it is still that error.
    _ = timeout(PATIENCE, read).await;
    String::from_utf8_lossy(&said).into_owned()
}
