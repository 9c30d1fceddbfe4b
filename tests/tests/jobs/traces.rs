//! Traces, as received by an OpenTelemetry collector.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use steadfast_tests::{Cluster, Job, Member, Scene};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Spans by id, with their services.
type Spans = BTreeMap<Vec<u8>, (String, Span)>;

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Spans>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_process in request.into_inner().resource_spans {
            let resource = of_process.resource.unwrap_or_default();
            let name = resource.attributes.iter().find(|it| it.key == "service.name");
            let name = name.and_then(|it| it.value.as_ref()?.value.clone());
            let Some(Value::StringValue(service)) = name else { panic!("no name: {resource:?}") };
            for span in of_process.scope_spans.into_iter().flat_map(|it| it.spans) {
                let mut spans = self.0.lock().unwrap();
                spans.insert(span.span_id.clone(), (service.clone(), span));
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    fn serve(&self, runtime: &Runtime) -> SocketAddr {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        let incoming = TcpListenerStream::new(listener);
        runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        address
    }
}

/// Returns the names of the ancestors of a span and of the span, the root first, with their services.
fn path(spans: &Spans, span: &Span) -> Option<String> {
    let (service, _) = &spans[&span.span_id];
    let own = format!("{service}:{}", span.name);
    if span.parent_span_id.is_empty() {
        return Some(own);
    }
    // The parent span of an aborted call may never have been exported.
    let (_, parent) = spans.get(&span.parent_span_id)?;
    assert_eq!(parent.trace_id, span.trace_id);
    path(spans, parent).map(|above| format!("{above}/{own}"))
}

/// Each step, or task, is one trace: from the read of the trainer to the update of the pservers.
#[test]
fn a_trace_goes_from_the_trainer_to_what_a_pserver_applies() {
    let runtime = Runtime::new().unwrap();
    let asynchronous = Job::asynchronous().with("passes = 30", "passes = 2");
    for (root, job) in [("step", Job::small()), ("task", asynchronous)] {
        let collector = Collector::default();
        let url = format!("http://{}", collector.serve(&runtime));
        let scene = Scene::new();
        let store = scene.path("store").display().to_string();
        let cluster = Cluster::new(&scene, &job, 2, "2s");
        let cluster = cluster.with_store(&store, &[("STEADFAST_OTLP_ENDPOINT", &url)]);
        let mut members = vec![cluster.master("master"), cluster.trainer("trainer")];
        members.extend([cluster.pserver("pserver-0"), cluster.pserver("pserver-1")]);
        assert_eq!(cluster.result()["state"], "finished");
        // Processes export pending spans before they exit.
        members.iter_mut().for_each(|it| assert_eq!(it.end().code, Some(0)));

        let spans = collector.0.lock().unwrap().clone();
        let mut paths = BTreeMap::<String, usize>::new();
        for path in spans.values().filter_map(|(_, span)| path(&spans, span)) {
            *paths.entry(path).or_default() += 1;
        }
        let trainer = format!("steadfast-trainer:{root}");
        for wanted in ["read", "compute", "push", "pull"] {
            let wanted = format!("{trainer}/steadfast-trainer:{wanted}");
            assert!(paths.contains_key(&wanted), "no {wanted} in {paths:#?}");
        }
        let push = format!("{trainer}/steadfast-trainer:push");
        let served = format!("{push}/steadfast-pserver:Push");
        // Each push goes to two pservers.
        assert_eq!(paths.get(&served), paths.get(&push).map(|it| it * 2).as_ref(), "{paths:#?}");
        let applied = format!("{served}/steadfast-pserver:apply");
        assert_eq!(paths.get(&applied), paths.get(&served), "{paths:#?}");
        let (_, server) = spans.values().find(|(_, it)| it.name == "Push").unwrap();
        assert_eq!(server.kind(), SpanKind::Server);
        if root == "task" {
            let requested = format!("{trainer}/steadfast-master:NextTask");
            assert_eq!(paths.get(&requested), paths.get(&trainer), "{paths:#?}");
        }
    }
}

/// An unavailable collector loses traces but affects neither steps nor bits; it is logged once.
#[test]
fn a_job_continues_without_its_collector() {
    let scene = Scene::new();
    let store = scene.path("store").display().to_string();
    let cluster = Cluster::new(&scene, &Job::small(), 1, "2s");
    let absent = [("STEADFAST_OTLP_ENDPOINT", "http://127.0.0.1:9")];
    let cluster = cluster.with_store(&store, &absent);
    let mut members = vec![cluster.master("master"), cluster.pserver("pserver")];
    members.push(cluster.trainer("trainer"));
    assert_eq!(cluster.result()["state"], "finished");
    let ended: Vec<_> = members.iter_mut().map(Member::end).collect();
    assert!(ended.iter().all(|it| it.code == Some(0)));
    let logged = ended[2].stderr.matches("cannot export spans").count();
    assert_eq!(logged, 1, "{}", ended[2].stderr);
}
